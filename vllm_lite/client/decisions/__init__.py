"""Typed decisions: questions about one state, each answered by the probabilities of one token. No text is generated

questions.py   the questions, and their text in the prompt
shared.py      the prompts of all questions, with a shared prefix
reads.py       from prompts to answers: the tokens of labels, and one request of the engine for each question
answers.py     the answers
methods.py     decide() of LLM, and the parts shared with AsyncClient
"""
