"""The version of this source: of the distribution, of every service, and what --version says."""

VERSION = "0.2.0"
