"""Every op in plain torch: the oracle of the tests, and the fallback for devices and dtypes without a faster one."""
