"""Shared parts of the GPU benchmarks: the device, its clock, poisoned memory, and the cases that are measured."""
