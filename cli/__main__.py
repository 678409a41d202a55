"""`python -m fuelrun` is `fuelrun`."""

from fuelrun.main import main

if __name__ == "__main__":
    main()
