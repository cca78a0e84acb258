//! Keys for S3 in a file.
use super::error::ObjectError;
use rusty_s3::Credentials;
use std::path::Path;

/// Largest file of credentials.
const MOST_BYTES: u64 = 64 << 10;

/// Reads the keys of a file.
///
/// # Errors
/// The file cannot be read, or has no keys.
pub(crate) fn read(path: &Path) -> Result<Credentials, ObjectError> {
    let wrong = |why: String| ObjectError::File { path: path.into(), why };
    let len = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if len > MOST_BYTES {
        return Err(wrong(format!("has {len} bytes; a file of credentials has at most {MOST_BYTES}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    // The text is not part of the message: it is secret.
    parse(&text).ok_or_else(|| {
        wrong("has no aws_access_key_id and aws_secret_access_key in its section [default]".into())
    })
}

fn parse(text: &str) -> Option<Credentials> {
    let mut default = false;
    let (mut key, mut secret, mut token) = (None, None, None);
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            default = section.trim() == "default";
        } else if let Some((name, value)) = line.split_once('=').filter(|_| default) {
            let value = Some(value.trim()).filter(|value| !value.is_empty());
            match name.trim() {
                "aws_access_key_id" => key = value,
                "aws_secret_access_key" => secret = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    Some(match token {
        Some(token) => Credentials::new_with_token(key?, secret?, token),
        None => Credentials::new(key?, secret?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_default_counts() {
        let text = "[other]\naws_access_key_id = x\n# a = b\n[default]\naws_access_key_id=K\n\
            aws_secret_access_key = a=b\n region = z\n[more]\naws_session_token = y\n";
        let keys = parse(text).unwrap();
        assert_eq!((keys.key(), keys.secret(), keys.token()), ("K", "a=b", None));
        assert_eq!(parse(&text.replace("more", "default")).unwrap().token(), Some("y"));
        assert!(parse("aws_access_key_id=K\naws_secret_access_key=S").is_none());
        assert!(parse("[default]\naws_access_key_id=K\naws_secret_access_key=\n").is_none());
    }

    #[test]
    fn an_error_has_no_secret() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "aws_secret_access_key = hidden").unwrap();
        let error = read(file.path()).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hidden"), "{error:?}");
        assert!(error.to_string().contains("[default]"));
    }
}
