"""GPU memory through the driver API alone: no torch, no CuPy. Loading it needs no driver; :func:`driver.load` does."""
