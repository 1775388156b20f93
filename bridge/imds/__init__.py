"""What IMDS says: client, discovery, documents and their differences."""
