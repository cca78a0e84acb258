//! Options whose values are those of an enumeration of another crate.
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// A value of an option: its name, its help, and what it stands for.
pub(crate) type Choice<T> = (&'static str, &'static str, T);

/// Parses the name of one of these.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    choices: &'static [Choice<T>],
) -> impl TypedValueParser<Value = T> {
    let value = |(name, help, _): &'static Choice<T>| match *help {
        "" => PossibleValue::new(*name),
        help => PossibleValue::new(*name).help(help),
    };
    PossibleValuesParser::new(choices.iter().map(value)).try_map(|name| {
        let named = choices.iter().find(|(known, ..)| *known == name);
        named.map(|(.., value)| *value).ok_or("unknown value")
    })
}

/// The name of a value.
pub(crate) fn name<T: PartialEq>(choices: &[Choice<T>], value: &T) -> &'static str {
    choices.iter().find(|(.., known)| known == value).map_or("", |(name, ..)| name)
}
