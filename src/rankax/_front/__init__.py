# SPDX-License-Identifier: MIT
"""Front ends, which users call: each binds its arguments, and `rankax.pipeline` evaluates."""
