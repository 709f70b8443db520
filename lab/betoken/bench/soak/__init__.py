"""Hours of faults beside healthy streams: whether answers stay right, and what services hold afterwards."""
