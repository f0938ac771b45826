"""The sections of the configuration, a file each; `penstock.config.settings` puts them together."""
