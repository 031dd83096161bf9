"""The application: the command, the embedded fleet, settings and wiring around gateway and router."""
