"""Attention kernels, and the plain-torch reference that they are tested against."""
