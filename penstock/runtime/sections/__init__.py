"""The sections of the configuration, a file each; `penstock.runtime.settings` puts them together."""
