"""Writers of the forms of other libraries, one module for each; all read from a `Source`."""
