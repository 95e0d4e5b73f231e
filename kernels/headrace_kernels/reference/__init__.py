"""Every op in plain torch: the oracle of the tests, and the path for devices and dtypes without a faster one."""
