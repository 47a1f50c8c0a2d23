"""One VMM process at a time: how it is started, driven and ended. Knows no workspaces, store or policy."""
