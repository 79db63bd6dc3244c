"""Writers of other libraries' formats, one module for each; all read from a `Source`."""
