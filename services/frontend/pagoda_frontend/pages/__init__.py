"""Pages of the server: the status page, the API's description and its pages. Decides nothing."""
