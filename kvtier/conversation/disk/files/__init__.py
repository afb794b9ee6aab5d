"""Files of tensors in a folder: how they are written, named and read, with their checksums.

Owns the folder, its lock and the bytes of files. May import nothing else of conversations: it knows neither chunks nor
the manifest.
"""
