"""The `fuelrun` command: thin click commands over the launcher and the library."""
