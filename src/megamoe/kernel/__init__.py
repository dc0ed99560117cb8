"""The kernel, one file per room; :mod:`megamoe.kernel.mega` puts them together."""
