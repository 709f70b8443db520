"""The `betoken` command, and the starting of services as local processes.

`local_services` and `service_process` work in the base install; the command itself needs the extra `cli`.
"""
