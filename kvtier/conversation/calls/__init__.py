"""Calls of `generate`: what one asks for, what of its rows is kept, and the call itself, from there on. What an encoder
gave is kept here too.

May import what is kept, what is saved, and the modules above that these import; no names of conversations.
"""
