"""The processes of the ranks on this node: started, watched, stopped, recovered in process."""
