# SPDX-License-Identifier: MIT
"""Call: arguments -> a bound call -> nested maps."""
