"""This machine: processes, ports, files of a run, memory, cores."""
