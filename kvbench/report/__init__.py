"""Shows rows: documents, tables, text charts. Reads records, measures nothing."""
