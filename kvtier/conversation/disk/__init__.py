"""What a store keeps on the disk: a folder of files of tensors, and a manifest that says what they are.

Owns the format, the checksums and the order of writes: whatever is damaged or incomplete is found, and used by nobody.
May import `index`; knows no cache and no model.
"""
