"""The controller of one job, and how it comes to be in charge: lease, reattach, detach, requests of people; its launch and its watch over the job."""
