"""The controller of one job, its launch and its watch, and how it comes to be in charge: lease, reattach, detach, requests of people."""
