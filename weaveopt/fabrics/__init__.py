"""Ways for ranks to reach each other's memory: topology, one arena per transport, the watchdog."""
