"""Access of ranks to each other's memory: topology, one arena for each transport, the watchdog."""
