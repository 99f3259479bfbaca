"""What there is to rewrite: one matcher a kind of site, and what matchers share."""
