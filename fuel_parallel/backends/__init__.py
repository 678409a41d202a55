"""What a device can do: one module per array library, and the copies between devices."""
