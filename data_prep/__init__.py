"""Scripts that write data sets and small models; `schema` defines the rows."""
