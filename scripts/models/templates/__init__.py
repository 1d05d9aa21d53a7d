"""Seeded question-and-answer templates: many questions, few answer patterns, for a very small model."""
