"""How fast collectives are here: `fuelrun bench`, and the table that `fuelrun bench --tune` writes."""
