# SPDX-License-Identifier: MIT
"""Front ends: the functions that users call. Each binds its arguments and calls `core.call.run`."""
