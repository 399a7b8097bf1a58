"""Process groups that can be mended: stock PyTorch calls them, what is under them can be replaced while a process lives on."""
