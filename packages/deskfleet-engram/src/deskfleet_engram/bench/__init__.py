"""The row store's benchmark: this reader, fio and other ways of reading on the same pack, in one run."""
