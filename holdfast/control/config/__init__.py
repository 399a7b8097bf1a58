"""What the controller reads from files and hands to workers: policy file, cluster file, environment of ranks."""
