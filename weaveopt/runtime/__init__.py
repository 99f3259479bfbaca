"""Who the ranks are and the memory they share: `topology` and `arena`."""
