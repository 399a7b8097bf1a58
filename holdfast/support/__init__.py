"""What somebody who helps needs to see of an installation, in one file and without its secrets."""
