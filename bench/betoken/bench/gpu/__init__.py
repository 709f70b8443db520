"""What the benchmarks of a GPU share: the device, its clock, poisoned memory, and the cases that are measured."""
