"""Seeds that find a bug that was there once, each verified by putting it back; always run.

A change of the simulation's draws makes other schedules of them: find them again then.
"""

KEPT: dict[int, str] = {
    50: "a grant was held whose target knew nothing of it: its fetch had ended with the stream before",
    75: "a request cancelled between the end of its fetch and its queueing was queued all the same, for ever",
    108: "as 50, with a target that stood still",
    263: "a token drawn on top of a failed step was emitted",
    4867: "a request whose deadline had passed asked with a negative patience, which no frame can carry",
    353: "a suspect prompt of another replica left its suspicion behind, and the next step ended the loop",
}
