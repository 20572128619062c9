"""What the server shows of itself: the status page, the API's description and its pages. Decides nothing."""
