"""Worker threads, their buffers and their progress bars."""
