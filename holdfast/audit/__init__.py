"""What a job could go back to, on the disk and in the nodes' memory, and whether all of it is as it was written. Starts without torch."""
