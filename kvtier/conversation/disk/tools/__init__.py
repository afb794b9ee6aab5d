"""What is done with a folder besides calls: behind `kvtier store`. No call and no opening of a store comes here.

contents.py  what a folder holds, read without the model that it is of; `verify`
upkeep.py    `Upkeep`: what nobody refers to is removed, small files are merged, what is damaged is forgotten
copying.py   a consistent copy, also while a store has the folder open

May import the parts of `disk` that files and rows are of; `Disk` itself imports none of these.
"""
