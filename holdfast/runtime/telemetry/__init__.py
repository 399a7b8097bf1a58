"""What a rank reports of itself: steps, waits, sections, its place in collectives, checksums of replicas."""
