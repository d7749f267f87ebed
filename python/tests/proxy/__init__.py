"""Tests of the proxy, as a package of their own: other folders may have tests and fakes of the same names."""
