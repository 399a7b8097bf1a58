"""How a process gets ready for a rank without its peers: a dry run of the script against recorded collectives."""
