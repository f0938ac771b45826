"""One module for each revision, oldest first by name; a revision that was released is not changed."""
