"""A reward model with several heads: one network says what people will say of each thing that they rate.

head            what is rated, on which scale; what somebody said of a response, by head
judged_rows     feedback as responses with their ratings, and pairs
heads_loss      the loss of a batch: unrated responses do not count
heads_measures  how good it is on what it was not trained on
calibration     what makes a head's number a share of people
heads_training  the training
heads_model     a model that was saved: scores responses, learns from more feedback
"""
