"""Finds devices that compute wrongly (the setting `check_devices`); `check` says how."""
